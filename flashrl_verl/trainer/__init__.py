# SPDX-License-Identifier: Apache-2.0
"""The DAPO trainer on verl's synchronous V1 trainer, its actor worker, and what it watches."""
