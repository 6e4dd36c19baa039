"""What the commands share: timing, contenders, results, output."""
