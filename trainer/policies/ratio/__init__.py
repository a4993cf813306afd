"""Policies of how much of the gradient is sent: pure functions, asked once a control period, alike on every rank."""
