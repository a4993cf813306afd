"""What a plan takes where it is launched: how this machine divides among workers, and how long a step is then."""
