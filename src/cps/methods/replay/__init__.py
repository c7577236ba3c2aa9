"""Methods that keep some images of earlier tasks."""
