"""The house as its imports have it, for the docs: a room is a folder or module, an arrow is an import."""

import grimp

CORE = (
    "run", "recovery", "publication", "planning", "governance", "ports", "declarations", "journal", "contracts",
)  # fmt: skip
EDGES = ("assets", "checks", "io_managers", "resources")
WORDS = {
    "run": "one run: hold, settle, admit, walk",
    "recovery": "what is done when it broke",
    "publication": "the path, in order",
    "planning": "a declaration becomes a proven plan",
    "governance": "what judges: SQL guard, hooks, gates, acceptance",
    "ports": "what is needed from outside",
    "declarations": "what authors write, read and refused",
    "journal": "what can happen",
    "contracts": "what things are called",
    "resources": "engines, drivers, stores",
    "io_managers": "readers and staged writer",
    "checks": "gates as asset checks",
    "assets": "marts and loads in Dagster",
}


def room_of(module: str) -> str | None:
    """The room of a module; None for the composition roots and for what every room may use (errors, faults)."""
    first, *rest = module.split(".")
    if first != "dpone_dagster":
        return first
    return rest[0] if rest and rest[0] in CORE else None


def arrows() -> set[tuple[str, str]]:
    """Every pair of rooms of which one imports the other."""
    graph = grimp.build_graph("dpone_dagster", *EDGES, cache_dir=None)
    found = set()
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            one, other = room_of(module), room_of(imported)
            if one and other and one != other:
                found.add((one, other))
    return found


def mermaid() -> str:
    """The rooms with the arrows that no longer way implies."""
    every = arrows()
    reached = set(every)
    while new := {(a, d) for a, b in reached for c, d in every if b == c} - reached:
        reached |= new
    shown = [(a, b) for a, b in every if not any((a, c) in reached and (c, b) in reached for c in WORDS)]
    rooms = [f'    {room}["{room}: {words}"]' for room, words in WORDS.items()]
    return "\n".join(["flowchart TD", *rooms, *(f"    {a} --> {b}" for a, b in sorted(shown))])


def back_up() -> list[tuple[str, str]]:
    """Arrows from a lower room of the core to a higher one, and from the core to what is round it."""
    order = [*EDGES, *CORE]
    return sorted((a, b) for a, b in arrows() if order.index(b) < order.index(a) and (b in CORE or a in CORE))
