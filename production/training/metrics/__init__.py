"""Measure steps without waiting for the device, and report and log the numbers."""
