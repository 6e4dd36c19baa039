"""Models as files: no pickle, written aside and renamed."""
