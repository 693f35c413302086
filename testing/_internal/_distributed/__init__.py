"""The modules behind ``common_distributed``: skips, helpers, and a file for each kind of ranks."""

from torch_ext.world import wording

_FRONT_DOORS = r"common_distributed|common_utils|hypothesis_utils"

# The modules between the world and a test's body; see Note [Hidden frames].
wording.hide(rf"/testing/_internal/(?:{_FRONT_DOORS}|_distributed/\w+)\.py")
wording.hide(
    r"/testing/_internal/(?:hypothesis_utils|_distributed/\w+)\.py",
    *(
        "wrapper",
        "run_test",
        "_run",
        "run_rank",
        "serve",
        "in_rank",
        "_receipt_of_body",
        "_receipt_of_call",
        "run_method",
    ),
)
wording.hide(r"/compat/_unittest\.py", "call", "clean_up", "<lambda>", "run_test_method")
wording.hide(r"/compat/_unittest\.py")
wording.hide(r"/unittest/case\.py", "run", "doCleanups", "_callTestMethod")
