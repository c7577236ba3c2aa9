"""Folders of images to a model file that grows."""
