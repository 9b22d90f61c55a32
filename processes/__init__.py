"""Running code apart: a fork server, what a process gives up before it looks at foreign bytes, children with a log."""
