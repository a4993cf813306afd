"""The programs of a rented machine: how it boots, how it hears that it will be taken back, how it joins the others."""
