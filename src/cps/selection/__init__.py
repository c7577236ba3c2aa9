"""Which task an image belongs to."""
