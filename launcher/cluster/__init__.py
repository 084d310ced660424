"""Who is in: membership, generations, quorum. A pure core that decides; the network is a thin shell around it."""
