"""stub"""

from attnquant.verification.values import VerificationReport


def page(report: VerificationReport) -> str:
    """x"""
    return ""
