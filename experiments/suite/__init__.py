"""The suite: all published experiments as resumable jobs, most important first."""
