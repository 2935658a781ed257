"""One batch on several ranks: parts of its sequences (`context`), or of the net (`tensor`)."""
