"""The waiting requests in their order of service: priorities, tenants, deadlines.

Entry points: `waiting.WaitingQueue`, `tenants.TenantQueue`, `tenants.RequestQueue`.
May import: request. No I/O, no clock.
"""
