"""Methods that keep no images: they hold outputs or important weights near those after earlier tasks."""
