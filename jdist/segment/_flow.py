"""What flows where in a program: which values depend on which."""

from collections.abc import Container, Iterable

from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from jdist._compat import reads


def ingredients(equation: JaxprEqn, dependent: Container[Var]) -> list[Var]:
    """What an equation reads, without repetition and without what is free."""
    found = dict.fromkeys(x for x in equation.invars if isinstance(x, Var))
    return [x for x in found if x in dependent]


def depending_on(program: ClosedJaxpr, sources: Iterable[Var]) -> set[Var]:
    """All values of a program that depend on some of its inputs, or on an effect."""
    found = set(sources)
    for equation in program.jaxpr.eqns:
        read = {x for x in equation.invars if isinstance(x, Var)}
        if equation.effects or (read and read <= found):
            found.update(equation.outvars)
        elif read & found:
            for result, arguments in reads(equation, program).items():
                if found.intersection(arguments):
                    found.add(result)
    return found
