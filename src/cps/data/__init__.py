"""Images, data sets and tasks."""
