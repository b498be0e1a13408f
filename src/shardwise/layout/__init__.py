"""Layout: the boxes of every wanted tensor that a rank holds, and their places in local storage."""
