"""The bridge to NNCF, and the only package that imports it.

`versions` says which releases are supported, `seams` where and why NNCF is changed, `onnx_seams` holds the changes for the
ONNX backend, `metatypes` the operator metatypes, `ports` the insertion points, `run` calls NNCF on one prepared model.
"""
