"""Reading a Q/DQ model as it is: where its quantizers are, whether they are sound, what they quantize. Nothing is edited."""
