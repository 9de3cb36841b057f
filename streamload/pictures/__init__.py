"""Pictures of samples and of runs. Pillow is imported when the first one is drawn."""
