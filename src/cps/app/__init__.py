"""From folders of images to a model file: scan, configure, learn, predict and inspect."""
