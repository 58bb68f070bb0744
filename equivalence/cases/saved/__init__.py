"""Keep the promoted cases that every run replays."""
