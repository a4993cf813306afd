"""How much of the gradient is sent: pure policies, asked once a control period, the same on every rank."""
