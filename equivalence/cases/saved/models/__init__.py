"""Keep the promoted training steps that every run replays."""
