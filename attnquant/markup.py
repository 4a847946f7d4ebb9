"""Text from a model, which may be anyone's, made safe for where it goes: no control character and no markup of theirs."""


def plain(text: str) -> str:
    """`text` with everything that is not printable written as an escape."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def code(text: str) -> str:
    """Inline code of markdown that no backtick or bar of the text ends."""
    return "`" + plain(text).replace("`", "'").replace("|", "\\|") + "`"


def escaped(text: str) -> str:
    """Text for markdown, in a table or outside."""
    for char in "\\`*_[]<>|":
        text = text.replace(char, f"\\{char}")
    return text


def row(cells: list[str]) -> str:
    """A row of a markdown table; the cells are escaped already."""
    return f"| {' | '.join(cells)} |"
