"""What is asked, and when."""
