"""What a user of Paddle calls."""
