"""What can happen: the state graph and the pure reducer over it."""
