"""The training text of the tokenizer of random checkpoints."""

from __future__ import annotations

SPOKEN = (
    "the rain is over and the sun is warm.",
    "we walk to the river in the morning.",
    "the old bridge is near the market.",
    "I hear you, please go on.",
    "a small boat is on the water.",
    "the cups are on the table.",
    "you and I like the quiet street.",
    "please take a little bread and tea.",
    "my friend is in the garden.",
    "the light over the water is soft.",
    "we like to sing in the evening.",
    "the train is late and we wait.",
    "take the small key and open the door.",
    "I think the wind is cold.",
    "you hear the birds over the garden.",
    "my letter is on the old table.",
    "we go home and the street is quiet.",
    "the bread is warm and the tea is good.",
)
"""Sentences of a few common words, each of which is one token."""

PROSE = """\
Good afternoon. The kitchen window is open, and somebody is playing the piano next door.
Would you rather sit outside, or is it still too cold for that?
A parcel arrived while you were out. It is heavy, so I left it beside the stairs.
Could you repeat the last part? There was a noise in the corridor and I missed it.
The museum opens at ten and closes at six, except on Mondays, when it stays shut all day.
Turn left at the bakery, follow the canal for a while, and you will see a yellow house.
Our neighbour grows tomatoes, beans and pumpkins, and every autumn she gives most of them away.
I counted nine swallows on the wire this morning; yesterday there were only seven.
How much flour do we need? Three cups, I believe, and a pinch of salt.
The bus was crowded, so we got off early and went the rest of the way on foot.
He repairs clocks in a narrow shop behind the station, and he is never in a hurry.
What happened to the blue umbrella? It must be in the hall, under the coats.
The lake was frozen from one end to the other, and children skated between the reeds.
She wrote the address on the back of a ticket and then lost the ticket.
When the lamp flickers, tap it gently on the side; that usually helps.
There are twelve chairs here but only eleven guests, so nobody has to stand.
Let me look at the calendar. Tuesday is free, Wednesday is not, Thursday might work.
The cat sleeps on the warm side of the roof and ignores everybody who calls her.
They painted the fence green in spring, and by summer the roses had hidden it completely.
It takes about twenty minutes by bicycle, or half an hour if the wind is against you.
My grandfather kept a notebook about the weather. It covers forty years without a gap.
Do not worry about the broken plate, we have more than enough of them.
A long time ago this road was a river bed; you can still find round stones in the fields.
The baker, the tailor and the teacher all live in the same street and share one ladder.
Nobody expected the orchestra to finish early, so the taxis came far too late.
Could we talk about something else? I have been thinking about invoices since breakfast.
The valley is quiet at night. Sometimes a fox barks, and then it is quiet again.
Bring a torch, a rope and some string, and leave the rest to me.
Hot soup, fresh bread, a little cheese and a pear: that was the whole dinner.
If the answer is yes, ring twice; if it is no, do not ring at all.
The printer is out of paper again. There should be a new packet on the lower shelf.
Between the two hills lies a village with a single shop and four churches.
She laughed, closed the book, and said that the ending could be guessed from the first page.
We measured the room: it is five metres long, four metres wide and rather dark.
Which of these keys belongs to the cellar? The one with the red ribbon, I suppose.
The ferry leaves every hour until nine, and after that you have to wait until morning.
An engineer explained the machine to us, slowly, with many drawings and much patience.
You are welcome to stay for the night. The guest room is small but it has a stove.
I am listening. Take your time, and tell me when you would like me to begin.
You are a helpful assistant. You answer in short and friendly sentences.
Streaming Omni Conversation. Speak when it is your turn, and listen when it is not.
The system, the user and the assistant take turns in this conversation.
"""
"""A page of plain English, from which the tokenizer learns to cut ordinary prompts into ordinary
tokens."""
