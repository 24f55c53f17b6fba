"""What `paceline train eval` asks beside held-out chats: short texts to shorten, and to find facts in."""

SUMMARISE: tuple[str, ...] = (
    "The city council voted on Tuesday to close the main square to cars from May to September. Shop "
    "owners had asked for longer delivery hours, which were granted: vans may enter until eleven in the "
    "morning. A report on noise, air and sales is due in October, after which the council will decide "
    "whether to keep the rule.",
    "Mangrove forests grow where rivers meet warm seas. Their roots slow the waves, hold the mud and give "
    "young fish a place to hide. Where mangroves were cut for shrimp farms, coasts lost metres of land "
    "each year. Planting them again works best when the old flow of water is restored first, because "
    "seedlings drown in still ponds.",
    "The library's new system lends tools as well as books. Members can take a drill, a sewing machine or "
    "a tent for one week. In its first year two thousand items were borrowed, and only nine came back "
    "broken. The librarians repair what they can on Thursdays, and visitors are welcome to watch and "
    "learn.",
    "Sleep is not one state. In the first half of the night deep sleep prevails, in which the body "
    "repairs itself. Towards the morning there are longer phases of vivid dreams. Alcohol makes it easier "
    "to fall asleep but cuts the second half short, which is why people wake tired after drinking "
    "although they slept eight hours.",
    "A small bakery in the harbour town switched from gas to electric ovens last winter. The owner "
    "expected higher bills, but the new ovens keep their heat, and the bakery now bakes two hours less "
    "per night. The old ovens went to a cooking school. Customers noticed only that the bread has a "
    "slightly darker crust.",
    "When the bridge was built in 1931, four hundred cars crossed it each day. Today it is eleven "
    "thousand. Rust has thinned the lower beams, and engineers advise against repairs. A new bridge would "
    "cost forty million and take three years; until then lorries have to use the ferry ten kilometres "
    "upstream.",
    "Bees tell each other where flowers are by dancing. The angle of the dance gives the direction "
    "relative to the sun, its length the distance. A bee that has danced once on a cloudy day corrects "
    "for the hidden sun. Experiments with robot bees show that the sound of the wings matters as much as "
    "the movement.",
    "The school tested a timetable that begins at nine instead of eight. Pupils slept forty minutes "
    "longer on average, were late half as often and had slightly better marks in mathematics. Parents "
    "with early shifts complained. The school now opens its hall at seven, with breakfast, and lessons "
    "still begin at nine.",
    "Glass is made by melting sand, soda and lime at about fifteen hundred degrees. Old glass melts at a "
    "lower temperature, so every tenth part of broken glass in the mix saves three percent of the energy. "
    "Green glass tolerates any colour, clear glass does not, which is why bottles are sorted by colour.",
    "The hikers lost the path in the fog above the lake. They had a map but no compass, and their phones "
    "were empty. They stayed where they were, put on all their clothes and sang, so that others could "
    "hear them. A shepherd found them at dawn, two hundred metres from the hut they had been looking for.",
)

EXTRACT: tuple[str, ...] = (
    "Maria Lopez ordered three blue lamps on 4 March 2021 from Northlight Ltd in Leeds. The invoice, "
    "number 20417, is for 149.70 pounds and is due on 3 April 2021.",
    "Dear team, the workshop moves from room 12 to the town hall. It begins at 9:30 on Friday, 16 June, "
    "and Peter Novak (peter.novak@example.org, 555 0143) brings the projector.",
    "Flight QX 218 leaves Porto at 07:45 and lands in Zurich at 11:20. Passenger: Anna Berg, seat 14C, "
    "one bag of 18 kg, booking code ZK4P9T.",
    "The recipe needs 250 g of flour, 2 eggs, 300 ml of milk, a pinch of salt and 30 g of butter, and "
    "makes eight pancakes in twenty minutes.",
    "In 1903 Elena Marsh founded the observatory near Tarn Hill; in 1911 Otto Reyes became its head, and "
    "in 1934 the great telescope, built by Harrow and Sons, was opened.",
    "Patient: John Ade, born 12 May 1980. Temperature 38.4, pulse 92, blood pressure 128 over 84. Dr. "
    "Silva prescribes ibuprofen, 400 mg, three times a day for four days.",
    "The house at 27 Mill Lane, Oakford, has four rooms on 96 square metres, was built in 1958 and costs "
    "265,000. Viewing on Saturday from 10 to 12; ask for Ms Tan.",
    "Team Red beat Team Green 3 to 1 on Sunday. Goals: Okoye (12th and 57th minute), Ruiz (70th), and for "
    "Green Lind (88th). 4,200 people watched in Harbour Stadium.",
    "To: support@example.com. My order 88121 from 2 November arrived without the charger. I am Lena Fox, "
    "5 Park Street, Milltown, and I would like a replacement rather than a refund.",
    "The Amber river rises at 1,840 metres in the Kest mountains, flows 312 km through Varn and Solm, and "
    "reaches the sea at Port Ellis with a mean flow of 96 cubic metres per second.",
)
