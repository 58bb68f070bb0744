"""Start a rank's process, and notice when another rank or the launcher is lost."""
