"""From what a user asked to a plan that fits what really runs."""
