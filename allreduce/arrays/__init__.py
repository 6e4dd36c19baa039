"""What is known of arrays, without any MPI."""
