"""Images, transforms, data sets and tasks."""
