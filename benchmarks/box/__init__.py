"""An account of EC2 that is unkind: the API is moto's, its moods, its IAM and what its machines do are acted."""
