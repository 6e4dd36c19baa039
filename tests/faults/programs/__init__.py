"""The programs that the ranks of a drawn run execute."""
