"""Development tools of the project. They are not part of the wheel, and nothing in
`r3async` imports them."""
