"""What is said, in the letters that the model writes."""

from thinwire_trainer.errors import RunError

from thinwire_deepspeech.decoding.alphabet import unknown


def transcript_of(text: str, place: str) -> str:
    """In capitals, with single spaces; RunError, naming the place, where it is empty or says what has no label."""
    transcript = " ".join(text.upper().split())
    if not transcript:
        raise RunError(f"{place}: the transcript is empty")
    if strange := unknown(transcript):
        shown = ", ".join(f"{character!r} (U+{ord(character):04X})" for character in strange[:5])
        raise RunError(
            f"{place}: the transcript has {shown}, expected letters A to Z, apostrophes and spaces: spell it out"
        )
    return transcript
