"""Files: the safetensors container, atomic writes, locks, encoded settings, reloading."""
