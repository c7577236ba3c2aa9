"""Which connections a task keeps."""
