"""What is done when it breaks."""
