"""Plan the main job, run its pieces in workers, shrink what differs, and count what ran."""
