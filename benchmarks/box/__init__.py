"""A simulated EC2 account with faults: the API is moto's; lags, refusals, IAM and what machines do are added."""
