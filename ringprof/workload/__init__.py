"""Parts of a workload: masks, document lengths and device specifications."""
