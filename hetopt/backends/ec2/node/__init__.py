"""What runs on a rented machine: how it boots, how it hears that it will be taken away, how it joins the others."""
