"""The store of several schedulers: facts in etcd, a copy of them in each scheduler."""
