"""What prompts are about, where the target is not left to choose by itself.

`OPENINGS` begin a user's turn, which the target then finishes; `QUESTIONS` are whole turns around a topic.
Both name the domain they belong to.
"""

OPENINGS: tuple[tuple[str, str], ...] = (
    ("code", "Write a Python function that"),
    ("code", "Write a Python function to"),
    ("code", "Write a Python class that"),
    ("code", "Fix the bug in this code:\n\n```python\ndef"),
    ("code", "Explain what this code does:\n\n```python\n"),
    ("code", "Complete the following function:\n\n```python\ndef"),
    ("code", "Write a SQL query that"),
    ("code", "Write a JavaScript function that"),
    ("code", "Write a bash script that"),
    ("code", "How do I use a dictionary in Python to"),
    ("math", "Solve the equation"),
    ("math", "Calculate the"),
    ("math", "A shop sells"),
    ("math", "If a train"),
    ("math", "What is the probability that"),
    ("math", "How many"),
    ("summarise", "Summarize the following text:\n\n"),
    ("summarise", "Summarize this article in two sentences:\n\nThe"),
    ("summarise", "Give me the key points of this passage:\n\n"),
    ("summarise", "Write a headline for this news story:\n\n"),
    ("extract", "Extract the names and dates from this text:\n\n"),
    ("extract", "List every place mentioned in the following text:\n\nOn"),
    ("extract", "Turn this paragraph into a table:\n\n"),
    ("extract", "Find the email address and phone number in this message:\n\nHello,"),
    ("extract", "Convert the following information to JSON:\n\nName:"),
    ("rewrite", "Rewrite this sentence to be more formal:"),
    ("rewrite", "Correct the grammar of this paragraph:\n\n"),
    ("rewrite", "Make this email shorter:\n\nDear"),
    ("rewrite", "Translate into French:"),
    ("rewrite", "Translate the following sentence to Spanish:"),
    ("rewrite", "Paraphrase the following:"),
    ("writing", "Write a short story about"),
    ("writing", "Write a poem about"),
    ("writing", "Write an email to"),
    ("writing", "Write a letter to"),
    ("writing", "Write a product description for"),
    ("writing", "Write a speech for"),
    ("writing", "Write a dialogue between"),
    ("chat", "What is the difference between"),
    ("chat", "What are the advantages of"),
    ("chat", "Explain how"),
    ("chat", "Explain why"),
    ("chat", "How can I"),
    ("chat", "How do I"),
    ("chat", "Give me five ideas for"),
    ("chat", "List ten"),
    ("chat", "Can you recommend"),
    ("chat", "Who was"),
    ("chat", "When did"),
    ("chat", "Tell me about"),
    ("chat", "I feel"),
    ("chat", "My friend"),
    ("chat", "I want to learn"),
    ("chat", "Plan a"),
    ("chat", "Compare"),
    ("chat", "Is it true that"),
    ("chat", "What should I do if"),
    ("chat", "What would happen if"),
)

QUESTIONS: tuple[tuple[str, str], ...] = (
    ("chat", "Explain {topic} to a ten-year-old."),
    ("chat", "What are the most important facts about {topic}?"),
    ("chat", "What are common misunderstandings about {topic}?"),
    ("chat", "Give me three tips about {topic}."),
    ("chat", "Why does {topic} matter today?"),
    ("chat", "How would you introduce {topic} in a short talk?"),
    ("chat", "What is the history of {topic}?"),
    ("writing", "Write a short poem about {topic}."),
    ("writing", "Write a paragraph about {topic}."),
    ("writing", "Write an email that invites a colleague to a talk about {topic}."),
    ("writing", "Tell me a story in which {topic} plays a part."),
    ("extract", "Make a list of ten words that have to do with {topic}."),
    ("extract", "Make a table with two columns, term and meaning, about {topic}."),
    ("summarise", "Summarize what is known about {topic} in three sentences."),
    ("code", "Write a small Python program that has to do with {topic}."),
    ("math", "Make up a word problem about {topic} and solve it step by step."),
)

TOPICS: tuple[str, ...] = tuple(
    """
    photosynthesis; the water cycle; volcanoes; black holes; gravity; the solar system; tides;
    lightning; rainbows; evolution; DNA; vaccines; the immune system; sleep; memory; stress; healthy
    food; yoga; running; first aid; climate change; recycling; solar power; wind power; electric cars;
    bicycles; trains; aeroplanes; bridges; maps; the Roman Empire; ancient Egypt; the Renaissance; the
    Industrial Revolution; the French Revolution; the printing press; the Silk Road; the space race;
    democracy; human rights; inflation; taxes; saving money; mortgages; insurance; budgets; the stock
    market; online shopping; job interviews; time management; teamwork; leadership; public speaking;
    negotiation; learning a language; grammar; poetry; Shakespeare; novels; film music; jazz; the piano;
    the guitar; painting; photography; architecture; chess; football; swimming; hiking; camping;
    gardening; tomatoes; bees; birds; whales; dogs; cats; horses; forests; deserts; rivers; the ocean;
    coral reefs; the Arctic; bread; coffee; tea; cheese; pasta; soup; breakfast; spices; chocolate;
    birthdays; weddings; moving house; raising children; homework; teachers; libraries; museums;
    friendship; honesty; courage; loneliness; happiness; sorting algorithms; hash tables; recursion;
    databases; the internet; passwords; encryption; spreadsheets; web pages; robots; machine learning;
    video games; mobile phones; computers; prime numbers; fractions; percentages; triangles;
    probability; statistics; compound interest; units of measurement; calendars; time zones; weather
    forecasts; earthquakes; floods; fire safety; road safety; public transport; cities; villages;
    farming; fishing; steel; glass; plastic; paper; cotton; gold; magnets; batteries; light bulbs;
    lasers; telescopes; microscopes
    """.replace("\n", " ").split(";")
)
TOPICS = tuple(" ".join(topic.split()) for topic in TOPICS)
