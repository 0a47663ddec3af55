"""Ways in which ranks share what they learn: `table` names them, `synchroniser` says what the loop asks of one."""
