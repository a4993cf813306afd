"""When workers that train for themselves average their parameters: pure functions of what all of them know."""
