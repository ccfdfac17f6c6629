"""The benchmark of choosing victims, small: what it measures is the right choice, cold and again after other uses."""

from __future__ import annotations

from eval.bench.policy_cost import Tree, compare


def test_the_victims_that_are_timed_are_those_of_the_definition() -> None:
    trees = {"sglang lru": Tree(None, 400), "gittins": Tree("gittins", 400)}
    for victims in (5, 120):
        result = compare(trees, victims, rounds=2)
        assert result["victims_as_defined"]
        assert result["cold"]["ratio"] > 0
        assert result["warm"]["ratio"] > 0


def test_victims_stay_right_while_everything_grows_old() -> None:
    """Time passes and few leaves are used, so most of them have aged since they were scored."""
    tree = Tree("gittins", 300)
    for step in range(12):
        tree.now += 40.0 * step
        tree.use(range(step, 300, 17))
        tree.cache.tick(tree.now)
        while tree.cache.tree_core.changed:
            tree.cache.tree_core.score_some()
        before = set(range(300)) - set(tree.present())
        expected = tree.named(9)
        gone = set(tree.evict(9)) - before
        assert sorted(gone) == expected, step
