# SPDX-License-Identifier: Apache-2.0
"""DAPO on verl's synchronous and colocated asynchronous V1 trainers: trainer, actor worker, and what it watches."""
